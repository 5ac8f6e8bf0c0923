"""One load: choose, plan, compare, verify, agree, apply."""
