"""How a command ends that cannot do what it was asked to do."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console

from .app_folder import APP_PACKAGES
from .errors import RunError, UsageError
from .interruption import orderly_termination


@contextmanager
def reported_errors(what: str = "the run") -> Iterator[None]:
    """Turn errors into one line and an exit code: 2 for wrong input, 1 for a failure, 130 for Ctrl-C.

    Parameters
    ----------
    what : str
        Subject of "... failed".
    """
    try:
        with orderly_termination():
            yield
    except UsageError as error:
        _fail(str(error), 2)
    except RunError as error:
        _fail(f"{what} failed: {error}", 1)
    except BrokenPipeError:  # who read the output, e.g. `| head`, has seen enough; nor can Python flush it at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        _fail(f"interrupted{error}", 130)
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in APP_PACKAGES:  # the app's own errors explain themselves
            traceback.print_exc()
        _fail(f"{what} failed: {error}", 1)


def _fail(text: str, code: int) -> NoReturn:
    Console(stderr=True).print(f"fedpcd: {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(code)
