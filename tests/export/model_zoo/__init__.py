"""Models as people have them, tiny and random, by family: what the tests of the whole road export and fuse."""
