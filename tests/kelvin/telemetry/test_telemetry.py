"""The metrics page of a process."""

import resource

from kelvin.telemetry.telemetry import open_without_traces


def test_page_of_a_process_without_descriptors() -> None:
    """The page shows all descriptors as open and leaves out values that need a free one."""
    telemetry = open_without_traces("x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        page = telemetry.render_page()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 'process_open_fds{process="x"} 3\n' in page
    assert "kelvin_loops_failing" in page
    assert "process_resident_memory_bytes" not in page
    assert "process_resident_memory_bytes" in telemetry.render_page()
