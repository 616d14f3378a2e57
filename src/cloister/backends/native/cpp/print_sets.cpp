// Prints the instruction sets of the machine that compiles, best first: CMakeLists.txt runs it to choose.
#include <cstdio>

#include "processor.cpp"

int main() {
    for (const std::string& name : cloister::runnable_sets()) std::printf("%s;", name.c_str());
}
