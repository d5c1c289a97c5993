"""``python -m gla`` is the command ``gla``."""

import sys

from gla.cli.main import main

sys.exit(main())
