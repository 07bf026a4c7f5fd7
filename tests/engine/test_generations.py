"""The news of a generation, from the control thread to the step loop."""

from __future__ import annotations

import threading

from ppengine.stage.generations import Generations

PATIENCE_S = 60.0


def test_a_release_that_has_begun_ends_before_the_generation_is_left() -> None:
    """Ranks keep their group for life: a release that ran on would let waits of the next generation end."""
    generations, order = Generations(1), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def release() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        order.append("released")

    def leave() -> None:
        generations.when_newer(None)
        order.append("left")

    generations.when_newer(release)
    control, main = (threading.Thread(target=one) for one in (lambda: generations.announce(2), leave))
    control.start()
    assert begun.wait(PATIENCE_S)
    main.start()
    main.join(0.1)
    go_on.set()
    main.join(PATIENCE_S)
    control.join(PATIENCE_S)
    assert order == ["released", "left"]
    generations.announce(3)
    assert order == ["released", "left"], "there is no call any more"
