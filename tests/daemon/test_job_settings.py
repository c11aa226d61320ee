from __future__ import annotations

import json
import re
from functools import partial

import pytest

from tenplexfs.daemon import job_settings
from tenplexfs.daemon.job_settings import check_changes, check_webhook, with_changes
from tenplexfs.errors import InvalidError

check_settings = partial(job_settings.check_settings, insecure=False)


def test_settings_come_out_as_one_form():
    given = '{"memory": "8GiB", "keep_steps": 2}'
    assert check_settings(given) == b'{"keep_steps": 2, "memory": 8589934592}'
    assert check_settings("") == b"{}"
    table = {"parallelizer": {"kind": "table", "rows": {"4": {"tp": 4}}}, "webhook": "https://x/y"}
    assert json.loads(check_settings(json.dumps(table))) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "settings: need a JSON object"),
        ("{", "settings: no valid JSON"),
        ("[" * 100_000, "settings: no valid JSON"),
        ('{"speed": 1}', "setting 'speed': unknown; there are: keep_steps"),
        ('{"keep_steps": 0}', "setting 'keep_steps': need a whole number >= 1, got 0"),
        ('{"keep_steps": true}', "setting 'keep_steps': need a whole number >= 1, got True"),
        ('{"memory": "much"}', "need a size"),
        ('{"parallelizer": 1}', "setting 'parallelizer': need an object"),
        ('{"webhook": 1}', "setting 'webhook': need a URL, got 1"),
        ('{"webhook": "ftp://x"}', "webhook 'ftp://x': need a URL"),
        ('{"webhook": "http://example.com"}', "http beyond this machine"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, message):
    with pytest.raises(InvalidError) as caught:
        check_settings(text)
    assert message in caught.value.message


def test_changes_are_checked_as_settings_are_and_change_nothing_where_all_is_so():
    changes = check_changes('{"memory": "1KiB", "webhook": null}', insecure=False)
    assert changes == {"memory": 1024, "webhook": None}
    had = b'{"webhook": "https://x/y","paused": "few"}'
    changed = with_changes(had, changes, None, b"")
    assert changed == b'{"memory": 1024, "paused": "few"}'
    assert with_changes(changed, changes, None, b"") == changed
    assert with_changes(b"", {"webhook": None}, None, b"") == b""
    for wrong, said in (
        ("", "name at least one"),
        ('{"datasets": null}', "setting 'datasets': unknown; there are: keep_steps"),
        ('{"replicas": 0}', "setting 'replicas': need a whole number >= 1"),
        ('{"webhook": "http://example.com"}', "http beyond this machine"),
    ):
        with pytest.raises(InvalidError, match=re.escape(said)):
            check_changes(wrong, insecure=False)


def test_events_go_in_the_clear_to_this_machine_only():
    for url in ("https://example.com/x", "http://127.0.0.1:80/", "http://[::1]:80/x", "http://localhost/"):
        check_webhook(url, insecure=False)
    with pytest.raises(InvalidError, match="http beyond this machine; give https"):
        check_webhook("http://example.com/", insecure=False)
    check_webhook("http://example.com/", insecure=True)
    for url in ("example.com", "http:///x", "http://x:99999/", "https://a b/", "https://[::1/"):
        with pytest.raises(InvalidError, match="webhook"):
            check_webhook(url, insecure=True)


def test_where_steps_are_persisted_is_completed_or_refused():
    made = json.loads(check_settings('{"persist": {"to": "/a/b/"}, "replicas": 2}', insecure=False))
    assert made == {"persist": {"to": "/a/b", "every": 1, "keep": 3}, "replicas": 2}
    for wrong, said in (
        ('{"persist": "/a"}', 'need {"to": directory or URL'),
        ('{"persist": {"to": "/a", "often": 2}}', 'need {"to": directory or URL'),
        ('{"persist": {"to": "a"}}', "to: 'a': need an absolute path, or s3://"),
        ('{"persist": {"to": "/a", "every": 0}}', "'persist.every': need a whole number >= 1, got 0"),
        ('{"persist": {"to": "/a", "keep": true}}', "'persist.keep': need a whole number >= 1, got True"),
        ('{"replicas": 0}', "'replicas': need a whole number >= 1, got 0"),
    ):
        with pytest.raises(InvalidError, match=re.escape(said)):
            check_settings(wrong, insecure=False)
