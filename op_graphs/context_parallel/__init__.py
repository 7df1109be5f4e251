"""Core attention over context-parallel ranks: one file an algorithm, ``docs/extending.md`` says how to add one."""
