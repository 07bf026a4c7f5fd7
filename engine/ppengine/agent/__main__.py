"""`python -m ppengine.agent --engine RUN_DIR/engine.json`."""

from ppengine.agent.agent import main

main()
