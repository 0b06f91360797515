"""Runs one untrusted program to its end, in a process of its own. Started by path, imports the standard
library only.

``python -I program_runner.py RESULT_FD SCRATCH MEMORY_BYTES CPU_SECONDS`` with the program on standard input.
When the program has run to its end the token on the first line of standard input is written to RESULT_FD; an
exception is written as ``error <type>: <message>``. A process that ends in any other way writes nothing. So a
program that calls ``os._exit(0)``, or that only stops early, does not pass.
"""

from __future__ import annotations

import os
import resource
import sys

# Kept before any guard can set them to None, as EvalPlus' does.
_getcwd, _realpath, _join = os.getcwd, os.path.realpath, os.path.join

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_OPEN_FILES = 64

# Audit events of operations that a function under test never needs.
_DENIED = frozenset(
    {
        "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.killpg",
        "os.putenv", "os.unsetenv", "subprocess.Popen", "pty.spawn", "signal.pthread_kill", "ctypes.dlopen",
        "ctypes.dlsym", "socket.__new__", "socket.connect", "socket.bind", "urllib.Request", "os.setxattr",
        "os.removexattr", "resource.setrlimit", "resource.prlimit",
    }
)  # fmt: skip
# Audit events whose first argument (and dir_fd) is a path that is changed.
_CHANGES_PATH = frozenset(
    {
        "os.remove", "os.rmdir", "os.rename", "os.truncate", "os.mkdir", "os.chmod", "os.chown", "os.chflags",
        "os.link", "os.symlink", "os.utime", "shutil.rmtree", "shutil.move", "shutil.chown",
        "shutil.copyfile",
    }
)  # fmt: skip


def install_guard(scratch: str, memory_bytes: int, cpu_seconds: int) -> None:
    """Limit this process and deny what a function under test never needs, for good.

    Limits: address space, processor time, size of a written file, open files, no core dump. Denied with
    PermissionError: starting processes, signals, sockets, loading C libraries, writing or deleting outside
    ``scratch``. It guards against accidents. It is no sandbox: the process can read what its user can read,
    and code that sets out to get past Python's audit hooks can.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    deny_outside(scratch)


def deny_outside(scratch: str) -> None:
    """Add the audit hook of :func:`install_guard`. ``scratch`` and ``/dev/null`` stay writable."""
    root = _realpath(scratch) + "/"
    writing = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
    fspath, fsdecode, devnull = os.fspath, os.fsdecode, os.devnull

    def inside(path: object, dir_fd: object = -1) -> bool:
        if isinstance(path, int) or path is None:
            return True
        name = fsdecode(fspath(path))  # type: ignore[call-overload]
        folder = (
            _realpath(f"/proc/self/fd/{dir_fd}") if isinstance(dir_fd, int) and dir_fd >= 0 else _getcwd()
        )
        return (_realpath(_join(folder, name)) + "/").startswith(root) or name == devnull

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # ctypes itself loads the interpreter, dlopen(None), when it is imported.
        if event in _DENIED and not (event == "ctypes.dlopen" and arguments[0] is None):
            raise PermissionError(f"{event} is not allowed in a generated program")
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & writing and not inside(path):
                raise PermissionError(f"writing outside the scratch folder is not allowed: {path!r}")
        elif event in _CHANGES_PATH:
            dir_fd = arguments[-1] if len(arguments) > 1 and isinstance(arguments[-1], int) else -1
            if not inside(arguments[0], dir_fd):
                raise PermissionError(f"{event} outside the scratch folder is not allowed: {arguments[0]!r}")

    sys.addaudithook(hook)


def main() -> None:
    result_fd, scratch, memory_bytes, cpu_seconds = sys.argv[1:]
    token, _, program = sys.stdin.buffer.read().decode("utf-8", "surrogatepass").partition("\n")
    write, leave = os.write, os._exit
    result = int(result_fd)
    os.chdir(scratch)
    install_guard(scratch, int(memory_bytes), int(cpu_seconds))
    try:
        code = compile(program, "<answer>", "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
    except BaseException as error:  # noqa: BLE001  whatever a program raises is its answer
        try:
            message = f"error {type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001  its __str__ is the program's own code
            message = f"error {type(error).__name__}"
        write(result, message[:500].encode("utf-8", "replace"))
        leave(1)
    write(result, token.encode())
    leave(0)


if __name__ == "__main__":
    main()
