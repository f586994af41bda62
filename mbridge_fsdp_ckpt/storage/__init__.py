"""The directory on disk: manifest, index files, payload, staging and commit, reader.  See docs/format.md."""
