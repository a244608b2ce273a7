from headrace.gateway.recent import Recent, Record


def record(request_id):
    return Record(
        request_id=request_id, model="m", endpoint="completions", stream=False, accepted=0.0
    )


def test_the_oldest_record_goes_first():
    recent = Recent(capacity=2)
    for request_id in ("a", "b", "c"):
        recent.add(record(request_id))
    assert recent.get("a") is None
    assert recent.get("b").request_id == "b"
    assert recent.get("c").status == "running"
