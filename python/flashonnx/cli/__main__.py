"""`python -m flashonnx.cli`."""

from flashonnx.cli import main

if __name__ == "__main__":
    main()
