"""Show a bar on a terminal by rich, which is loaded where there is one."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Count(ProgressColumn):
    """Show how many are done, and where these have a name how many are in a minute."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        total = "?" if task.total is None else f"{task.total:.6g}"
        if not self._what:
            return Text(f"{task.completed:.6g}/{total}")
        speed = task.finished_speed or task.speed
        rate = "" if speed is None else f" {60 * speed:.3g} {self._what}/min"
        return Text(f"{task.completed:.1f} of {total} {self._what}{rate}")


@contextlib.contextmanager
def on_terminal(title: str, total: int, what: str, *, forced: bool) -> Iterator[Callable[[float, str], None]]:
    """Show a bar inside, see :func:`.progress.bar`; ``forced`` where standard error is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), _Count(what), TimeRemainingColumn())
    console = Console(stderr=True, force_terminal=True if forced else None)
    with Progress(*columns, console=console, transient=True) as shown_bar:
        task = shown_bar.add_task(title, total=total or None)

        def advance(count: float, text: str) -> None:
            shown_bar.update(task, advance=count, description=f"{title}: {text}" if text else None)

        yield advance
