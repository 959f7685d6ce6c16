"""Models as files and as graphs: read, written out, given new nodes."""
