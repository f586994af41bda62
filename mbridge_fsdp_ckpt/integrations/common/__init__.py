"""What the plug-ins share."""
