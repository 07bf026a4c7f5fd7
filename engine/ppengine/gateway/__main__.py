"""`python -m ppengine.gateway --engine RUN_DIR/engine.json`."""

import sys

from ppengine.gateway.gateway import main

sys.exit(main())
