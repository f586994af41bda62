"""The directory on disk: manifest, chunk tables, payload, staging and commit, reader.  See docs/format.md."""
