"""Well-known models, built without their weights, and the loading of the user's own.

Order of reading: ``catalogue`` (names and sizes), ``transformer``, ``gpt``, ``llama``, ``vision`` (the modules),
``load`` (what a command line's MODEL may be).
"""
