"""What people read: plans explained, programs dumped as Python, JSON, dot and SVG."""
