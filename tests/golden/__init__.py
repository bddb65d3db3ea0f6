"""Golden files: what the kernels are given, what models and drafters say, and which options there are, as text.

`PYTHONPATH=src:tests python -m golden.make [NAME ...]` writes them, `test_golden.py` compares them. Only `names.py` and
`meaning.py` know how the code names things: where code is renamed or moved, these two change and no text does.
"""
