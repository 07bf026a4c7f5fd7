"""Terminal console for a running ppengine: CLI, link, model, views, screens."""
