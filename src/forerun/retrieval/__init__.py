"""A corpus of tokens on disk in which every n-gram is found by binary search. It knows nothing of drafters."""

from forerun.retrieval.build import append_index, build_index, tokenise
from forerun.retrieval.continuations import Continuations, best_nodes
from forerun.retrieval.file import Header, read_header
from forerun.retrieval.index import Index, Match
from forerun.retrieval.sources import Document, find_files, read_documents
from forerun.retrieval.suffixes import sort_suffixes

__all__ = [
    "Continuations",
    "Document",
    "Header",
    "Index",
    "Match",
    "append_index",
    "best_nodes",
    "build_index",
    "find_files",
    "read_documents",
    "read_header",
    "sort_suffixes",
    "tokenise",
]
