from coordinator.versions import NEWEST, off, unknown


def test_only_a_newer_minor_version_than_the_tests_know_is_unknown() -> None:
    major, minor = NEWEST["tensorflow"]
    known = {"tensorflow": f"{major}.{minor}.9-dev20261026", "keras": "3.10.0"}
    assert unknown(known) == []
    [text] = unknown({**known, "tensorflow": f"{major}.{minor + 1}.0rc1"})
    assert text.startswith(f"tensorflow {major}.{minor + 1}.0rc1 is newer than {major}.{minor}")
    assert unknown({**known, "keras": "4.0.0"})


def test_what_is_off_is_said_of_the_versions_without_it() -> None:
    assert [bool(off({"tensorflow": version})) for version in ("2.19.1", "2.20.0", "2.21.0")] == [True, True, False]
