"""python -m espalier.cli"""

import sys

from espalier.cli.main import main

sys.exit(main())
