"""Run a command until it ends or standard input closes: a server must not outlive a killed job.

Run as a script, with the command as its arguments; the parent process holds the other end of standard input.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

PATIENCE_S = 10.0


def main() -> int:
    """Start the command in a new process group; return its status once the whole group has ended."""
    try:
        process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", flush=True)
        return 127

    def end_with_input() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread that holds its lock at exit aborts the interpreter
            pass
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        signal_group(process.pid, signal.SIGKILL)

    threading.Thread(target=end_with_input, daemon=True).start()
    status = process.wait()
    signal_group(process.pid, signal.SIGKILL)  # workers that the command left behind
    return status


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group that may already have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
