"""`python -m flashonnx`: the command line, also where its script is not on the path."""

from flashonnx.cli import main

if __name__ == "__main__":
    main()
