"""What speculation will gain, by one predictor: from costs measured here or a roofline, and from acceptance."""
