"""python -m espalier.train"""

import sys

from espalier.train import start

sys.exit(start())
