"""What a submission uploads, what it would miss, and how a refusal is explained."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlmgrid.cluster import submission
from dlmgrid.cluster.submission import (
    connect_client,
    entrypoint,
    explain_refusal,
    measure_upload,
    runtime_environment,
)
from dlmgrid.workers.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a large history, results, an ignored file, and a linked folder."""
    sizes = {".git/pack": 10**6, "out/rows.parquet": 10**6, "jobs/run.py": 100, "tests/test_a.py": 100}
    for name, size in sizes.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "jobs" / "out").mkdir()
    (tmp_path / "jobs" / "out" / "kept.txt").write_text("kept")
    (tmp_path / ".gitignore").write_text("secret.yaml\n")
    (tmp_path / "secret.yaml").write_text("name: secret")
    (tmp_path / "grid.yaml").write_text("name: grid")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "jobs").symlink_to("../jobs")
    return tmp_path


def test_history_results_and_tests_stay_here_and_links_are_copied(checkout: Path) -> None:
    names = {path.relative_to(checkout).as_posix() for path in submission.uploaded_files(checkout)}
    linked = {"jobs/run.py", "jobs/out/kept.txt"}
    assert names == {".gitignore", "grid.yaml"} | linked | {f"package/{name}" for name in linked}
    upload = measure_upload(checkout, [checkout / "grid.yaml"])
    assert (upload.num_files, upload.num_bytes < 1000) == (6, True)


def test_a_needed_file_that_is_ignored_or_elsewhere_is_named(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(InputError, match=r"secret.yaml would not be uploaded .* left out by .gitignore"):
        measure_upload(checkout, [checkout / "secret.yaml"])
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "grid.yaml"
    elsewhere.write_text("name: x")
    with pytest.raises(InputError, match="would not be uploaded"):
        measure_upload(checkout, [elsewhere])


def test_a_large_folder_is_refused_by_its_largest_entries(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "MAX_UPLOAD_BYTES", 3 * 2**20)
    (checkout / "weights.bin").write_bytes(b"x" * 4 * 2**20)
    with pytest.raises(
        InputError, match=r"would upload 4 MiB, more than the 3 MiB .*: weights.bin \(4 MiB\), "
    ):
        measure_upload(checkout, [])


def test_this_checkout_is_small_and_whole() -> None:
    needed = [ROOT / "dlmgrid" / "jobs" / "grid.py", ROOT / "jobs" / "grids" / "demo.yaml"]
    upload = measure_upload(ROOT, needed)
    assert upload.num_bytes < 50 * 2**20


def test_the_entry_point_is_one_plain_command() -> None:
    line = entrypoint("jobs/grids/demo.yaml", Path("/data/my runs"), ["--limit", "2"])
    assert line == "python -m dlmgrid.jobs.grid jobs/grids/demo.yaml --out '/data/my runs' --limit 2"


def test_offline_flags_travel_with_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in submission.FORWARDED:
        monkeypatch.delenv(name, raising=False)
    assert "env_vars" not in runtime_environment(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert runtime_environment(tmp_path)["env_vars"] == {"HF_HUB_OFFLINE": "1"}
    assert ".git" in runtime_environment(tmp_path)["excludes"]


@pytest.fixture
def refusing_cluster() -> Iterator[str]:
    """A dashboard that answers every request with 401, as a cluster with token authentication does."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b"Unauthorized: Missing authentication token")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_refusal_names_both_sides_of_the_remedy(
    refusing_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(
        InputError, match=r"refuses this client \(RAY_AUTH_MODE is unset here\): set RAY_AUTH_MODE=token"
    ):
        connect_client(refusing_cluster)


def test_other_answers_and_wrong_addresses_are_told_apart() -> None:
    assert "did not take the job: no such submission" in str(
        explain_refusal("http://h:1", RuntimeError("no such submission"))
    )
    with pytest.raises(InputError, match=r"is not a dashboard address; give http://HOST:8265"):
        connect_client("127.0.0.1:6379")
    with pytest.raises(InputError, match=r"no Ray dashboard at http://127\.0\.0\.1:9"):
        connect_client("http://127.0.0.1:9")
