"""forerun's drafters and its loop inside other programs."""
