"""python -m espalier.cli"""

import sys

from espalier.cli import start

sys.exit(start())
