from persistence.findings import Finding


def test_a_finding_is_one_line_of_risk_place_and_remedy_whose_sentences_end_once():
    bare = Finding("no-aof", "...10.0.0.1 keeps nothing", "Switch appendonly on", unsafe=True)
    assert str(bare) == "no-aof: ...10.0.0.1 keeps nothing. Switch appendonly on"
    assert str(Finding("no-aof", "X keeps nothing.", ".. or X.")) == "no-aof: X keeps nothing. .. or X"
    assert str(Finding("no-aof", "1 < 2X", "2 > 1X")) == "no-aof: 1 < 2X. 2 > 1X"
