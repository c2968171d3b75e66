"""Two versions of a kernel on the same cases, both beside the reference, before any traffic meets the new one."""
