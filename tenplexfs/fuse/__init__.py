"""The mount: thin handlers over the namespace, by pyfuse3."""
