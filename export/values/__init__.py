"""What is known about values: symbolic shapes, integers in shape tensors, constants."""
