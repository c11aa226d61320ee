"""What doctor says of the ports of a daemon that does not run."""

from __future__ import annotations

import socket
from pathlib import Path

from tenplexfs.daemon.config import load_config
from tenplexfs.daemon.doctor import examine


def findings(tmp_path: Path, **flags: str) -> dict[str, tuple[str, str]]:
    config = load_config(
        {
            "node": "a",
            "no_mount": "on",
            "listen": "127.0.0.1:0",
            "store": str(tmp_path / "store"),
            "socket": str(tmp_path / "a.sock"),
            **flags,
        },
        environ={"XDG_CONFIG_HOME": "/nowhere"},
        system_file=Path("/nowhere/tenplexfs.toml"),
    )
    return {each.what: (each.verdict, each.message) for each in examine(config)}


def test_the_port_for_tenplexs_clients_is_looked_at(tmp_path):
    assert "http" not in findings(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        verdict, message = findings(tmp_path, http=address)["http"]
        assert verdict == "broken" and message.startswith(f"{address}: Address already in use")
    assert findings(tmp_path, http=address)["http"] == ("ok", f"{address} is free")
    where = address.replace("127.0.0.1", "0.0.0.0")
    assert findings(tmp_path, http=where, insecure="on")["http"][0] == "warning"
