"""Where a model attends: each softmax between two products, each attention operator."""
