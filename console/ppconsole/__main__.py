"""`python -m ppconsole`."""

import sys

from ppconsole.cli import main

sys.exit(main())
