"""Publishing a tag: the session of a job in a directory, votes, commit, publication and retention."""
