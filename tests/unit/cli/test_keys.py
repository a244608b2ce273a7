from datetime import UTC, datetime

import pytest

from headrace.cli.main import main
from headrace.shared.api_keys import ApiKey, digest_of, parse_file


def test_a_new_key_is_shown_with_the_line_that_lets_it_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["keys", "new", "--tenant", "acme", "--name", 'the "ci" \\ \x7f', "--expires-days", "7"]
    assert main(given) == 0
    key, line = (text for text in capsys.readouterr().out.splitlines() if text[:1] in ("h", '"'))
    assert key not in line
    (owner,) = parse_file(line).items()
    assert owner[0] == digest_of(key)
    assert (owner[1].tenant, owner[1].name) == ("acme", 'the "ci" \\ \x7f')
    assert owner[1].expires is not None
    assert (owner[1].expires - datetime.now(UTC)).days in (6, 7)


def test_no_two_keys_are_alike(capsys: pytest.CaptureFixture[str]) -> None:
    main(["keys", "new", "--tenant", "acme"])
    main(["keys", "new", "--tenant", "acme"])
    keys = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hr_")]
    assert len({*keys}) == 2
    assert all(len(key) == 46 for key in keys)
    assert parse_file("") == {}
    assert ApiKey(tenant="acme").expires is None


@pytest.mark.parametrize(
    "given", [["--tenant", "a.b"], ["--tenant", "a", "--expires-days", "0"], ["--tenant", ""]]
)
def test_a_key_for_nobody_is_not_made(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", *given]) == 2
    assert "hr_" not in capsys.readouterr().out
