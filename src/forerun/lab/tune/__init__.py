"""`forerun tune`: which drafter and K are fastest for a user's prompts, model and machine, or that none is."""
