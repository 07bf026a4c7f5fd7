"""The news of a generation, as the control thread and the step loop of a stage receive it."""

from __future__ import annotations

from ppengine.stage.generations import Generations


def test_a_replaced_process_enters_no_generation_of_its_successor() -> None:
    generations, over = Generations(2), list[int]()
    generations.on_newer = lambda: over.append(generations.newest)
    generations.announce(3, 3)
    assert (generations.superseded, over) == (False, [])
    generations.announce(3, 2)
    assert (generations.superseded, over, generations.enter()) == (True, [3], 3)


def test_a_core_that_knows_an_older_process_reaches_the_present_one() -> None:
    """A core that follows another one may have missed the start of a process."""
    generations = Generations(4)
    generations.announce(5, 2)
    assert generations.superseded
