// Two libraries of companions/CMakeLists.txt consist of their names alone.
