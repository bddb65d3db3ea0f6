"""`forerun chat`: a conversation in the terminal, or message by message on a pipe."""
