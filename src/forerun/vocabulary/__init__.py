"""What the token ids of a tokenizer stand for: compared, told apart by a hash, and as bytes of text."""

from forerun.vocabulary.compare import Vocabulary, check_same_tokens
from forerun.vocabulary.fingerprint import fingerprint, ids_fingerprint
from forerun.vocabulary.token_bytes import shared_tokens, token_bytes
from forerun.vocabulary.tokenizer import encode_text, special_tokens, tokens_by_id

__all__ = [
    "Vocabulary",
    "check_same_tokens",
    "encode_text",
    "fingerprint",
    "ids_fingerprint",
    "shared_tokens",
    "special_tokens",
    "token_bytes",
    "tokens_by_id",
]
