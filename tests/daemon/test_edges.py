from __future__ import annotations

import io
import logging
import socket

from tenplexfs.daemon.logs import setup_logs
from tenplexfs.daemon.notify import sd_notify


def test_the_service_manager_is_told(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        sd_notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    sd_notify("STOPPING=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    sd_notify("READY=1")


def test_a_record_is_one_line_with_its_traceback(monkeypatch):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    try:
        setup_logs()
        try:
            int("two\nlines")
        except ValueError:
            logging.getLogger("tenplexfs.runtime.x").exception("what %s", "failed")
    finally:
        root.handlers[:], root.level = handlers, level
    (line,) = stream.getvalue().splitlines()
    assert "ERROR runtime.x: what failed | Traceback" in line
