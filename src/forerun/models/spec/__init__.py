"""What a decoder is made of, as data: a list of layers, each a list of parts with fields of their own."""
