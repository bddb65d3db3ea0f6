"""Operations on tensors, one a file: references in PyTorch, which any other implementation must agree with."""
