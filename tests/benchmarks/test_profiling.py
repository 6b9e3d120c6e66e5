from __future__ import annotations

from benchmarks.profiling import from_report, from_stacks, table


def test_a_sample_counts_for_the_function_it_ended_in() -> None:
    stacks = [
        "main (a.py:1);run (b.py:10) 3",
        "main (a.py:2);run (b.py:12) 4",
        "main (a.py:2) 1",
        "main (a.py:2);memcpy (libc.so.6) 2",
        "",
    ]
    assert from_stacks(stacks) == {"run (b.py)": 7, "main (a.py)": 1, "memcpy (libc.so.6)": 2}


def test_the_lines_of_perf() -> None:
    report = [
        "# Samples: 986  of event 'cpu-clock'",
        "",
        " 90.50% |libc.so.6        |[.] __memmove",
        "  9.00% |[kernel.kallsyms]|[k] copy_user",
        "  0.50% |lib.so           |[.] operator|(A, B)",
    ]
    assert from_report(report) == {
        "__memmove (libc.so.6)": 90.5,
        "copy_user ([kernel.kallsyms])": 9.0,
        "operator|(A, B) (lib.so)": 0.5,
    }


def test_the_table_shows_the_most_of_all() -> None:
    assert table({"a": 1, "b": 2, "c": 5}, top=2).splitlines()[2:] == [
        "| `c` | 62.5 |",
        "| `b` | 25.0 |",
    ]
