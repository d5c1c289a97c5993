"""The command line: one file a command, each with ``run(argv) -> exit code``.

``main`` knows only names and summaries, so that ``gla --help`` starts without torch.
"""
