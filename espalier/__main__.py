"""python -m espalier"""

import sys

from espalier.cli import start

sys.exit(start())
