from headrace.gateway.recent import Recent, Record


def record(request_id, tenant="acme"):
    return Record(
        request_id=request_id,
        tenant=tenant,
        model="m",
        endpoint="completions",
        stream=False,
        accepted=0.0,
    )


def test_the_oldest_record_that_has_ended_goes_first():
    recent = Recent(capacity=2)
    running, ended, later, last = (record(request_id) for request_id in ("a", "b", "c", "d"))
    ended.status = later.status = "ok"
    for each in (running, ended, later, last):
        recent.add(each)
    assert [recent.get("acme", request_id) for request_id in "abcd"] == [running, None, None, last]


def test_what_runs_stays_however_much_it_is():
    recent = Recent(capacity=2)
    for request_id in ("a", "b", "c"):
        recent.add(record(request_id))
    assert [recent.get("acme", request_id).status for request_id in "abc"] == ["running"] * 3


def test_two_tenants_may_use_the_same_id():
    recent = Recent()
    recent.add(record("a"))
    recent.add(record("a", "globex"))
    recent.discard(record("a"))
    assert recent.get("acme", "a") is None
    assert recent.get("globex", "a").tenant == "globex"
