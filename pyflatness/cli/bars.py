"""Show how far a run over checkpoints is: a bar on standard error, with the rate and the time that is left."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def render(self, task: Task) -> Text:
        """Return how many are done in a minute."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{60 * speed:.3g} {self._what}/min")


def bar(what: str, shown: bool | None) -> Progress:
    """Return a bar for so many of something.

    Args:
        what: is counted.
        shown: whether it is; None: on a terminal. A log then gets nothing, not even an empty line.
    """
    console = Console(stderr=True, force_terminal=True if shown else None)
    console.quiet = not (console.is_terminal if shown is None else shown)
    count = TextColumn("{task.completed:.1f} of {task.total} " + what)
    columns = (TextColumn("{task.description}"), BarColumn(), count, _Rate(what), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=console.quiet)
