"""From and to other formats and layouts."""
