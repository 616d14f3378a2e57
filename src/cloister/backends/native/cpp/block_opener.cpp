// Opens many sealed KV blocks with one call, which lets other threads of Python run meanwhile: AES-256-GCM of the system's libcrypto
// (OpenSSL 3), which is looked for when it is first wanted. It is what the library `cryptography` calls for one block at a time.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#if __has_include(<dlfcn.h>)
#include <dlfcn.h>
#endif

namespace nb = nanobind;

namespace cloister {

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr size_t key_bytes = 32, tag_bytes = 16, nonce_bytes = 12;
constexpr int set_tag = 0x11;  // EVP_CTRL_AEAD_SET_TAG

struct Crypto {
    void* (*make)() = nullptr;                                                              // EVP_CIPHER_CTX_new
    void (*drop)(void*) = nullptr;                                                          // EVP_CIPHER_CTX_free, which wipes
    const void* (*aes_256_gcm)() = nullptr;                                                 // EVP_aes_256_gcm
    int (*init)(void*, const void*, void*, const uint8_t*, const uint8_t*) = nullptr;       // EVP_DecryptInit_ex
    int (*control)(void*, int, int, void*) = nullptr;                                       // EVP_CIPHER_CTX_ctrl
    int (*update)(void*, uint8_t*, int*, const uint8_t*, int) = nullptr;                    // EVP_DecryptUpdate
    int (*finish)(void*, uint8_t*, int*) = nullptr;                                         // EVP_DecryptFinal_ex
    void (*cleanse)(void*, size_t) = nullptr;                                               // OPENSSL_cleanse
    const char* (*version)(int) = nullptr;                                                  // OpenSSL_version
    bool is_there = false;

    Crypto() {
#if __has_include(<dlfcn.h>)
        void* library = nullptr;
        for (const char* name : {"libcrypto.so.3", "libcrypto.3.dylib"})
            if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!library) return;
        is_there = find(library, "EVP_CIPHER_CTX_new", make) && find(library, "EVP_CIPHER_CTX_free", drop) && find(library, "EVP_aes_256_gcm", aes_256_gcm) &&
                   find(library, "EVP_DecryptInit_ex", init) && find(library, "EVP_CIPHER_CTX_ctrl", control) && find(library, "EVP_DecryptUpdate", update) &&
                   find(library, "EVP_DecryptFinal_ex", finish) && find(library, "OPENSSL_cleanse", cleanse) && find(library, "OpenSSL_version", version);
#endif
    }

private:
#if __has_include(<dlfcn.h>)
    template <class Function> static bool find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
#endif
};

const Crypto& crypto() {
    static const Crypto found;
    return found;
}

// One block to open, as Python packs it. What is authenticated with it: the chain's bytes, then those from `described` on.
#pragma pack(push, 1)
struct Record {
    uint64_t place, size, out;  // of the sealed bytes; of its contents without the tag; where they go
    uint8_t nonce[nonce_bytes];
    uint8_t described[44];
};
#pragma pack(pop)

class BlockOpener {
public:
    explicit BlockOpener(const ConstBytes& key) {
        if (!crypto().is_there) throw std::runtime_error("there is no libcrypto of OpenSSL 3");
        if (key.size() != key_bytes) throw std::invalid_argument("a key has 32 bytes");
        std::memcpy(key_, key.data(), key_bytes);
    }
    BlockOpener(const BlockOpener&) = delete;
    ~BlockOpener() { crypto().cleanse(key_, key_bytes); }

    // Writes 1 for each block that opened, else 0 and zeros as its contents: also for one that goes beyond what was read. The room was
    // checked before.
    void open(const uint8_t* sealed, size_t sealed_size, const uint8_t* chain, size_t chain_size, const Record* records, size_t count, uint8_t* room, uint8_t* opened) const {
        const Crypto& c = crypto();
        std::unique_ptr<void, void (*)(void*)> context(c.make(), c.drop);
        bool has_key = context && c.init(context.get(), c.aes_256_gcm(), nullptr, key_, nullptr) == 1;
        for (size_t i = 0; i < count; i++) {
            const Record& r = records[i];
            uint8_t* content = room + r.out;
            bool is_read = sealed_size >= tag_bytes + r.size && r.place <= sealed_size - tag_bytes - r.size;
            opened[i] = has_key && is_read && open_one(context.get(), sealed + r.place, chain, chain_size, r, content);
            if (!opened[i]) std::memset(content, 0, r.size);
        }
    }

private:
    static bool open_one(void* context, const uint8_t* sealed, const uint8_t* chain, size_t chain_size, const Record& r, uint8_t* content) {
        const Crypto& c = crypto();
        uint8_t tag[tag_bytes];
        std::memcpy(tag, sealed + r.size, tag_bytes);
        int length = 0;
        return c.init(context, nullptr, nullptr, nullptr, r.nonce) == 1 && c.update(context, nullptr, &length, chain, int(chain_size)) == 1 &&
               c.update(context, nullptr, &length, r.described, int(sizeof r.described)) == 1 &&
               c.update(context, content, &length, sealed, int(r.size)) == 1 && size_t(length) == r.size &&
               c.control(context, set_tag, int(tag_bytes), tag) == 1 && c.finish(context, content + r.size, &length) == 1;
    }

    uint8_t key_[key_bytes];
};

}  // namespace

void bind_block_opener(nb::module_& m) {
    m.def("find_libcrypto", [] { return crypto().is_there ? std::string(crypto().version(0)) : std::string(); });
    nb::class_<BlockOpener>(m, "BlockOpener")
        .def(nb::init<const ConstBytes&>())
        .def("open", [](const BlockOpener& self, const ConstBytes& sealed, const ConstBytes& chain, const ConstBytes& records, Bytes room) {
            if (records.size() % sizeof(Record) || chain.size() > INT32_MAX) throw std::invalid_argument("there is no whole number of records");
            size_t count = records.size() / sizeof(Record);
            const Record* first = reinterpret_cast<const Record*>(records.data());
            for (size_t i = 0; i < count; i++) {
                const Record& r = first[i];
                if (r.size > INT32_MAX || room.size() < r.size || r.out > room.size() - r.size) throw std::invalid_argument("contents lie outside of their room");
            }
            std::string opened(count, '\0');
            {
                nb::gil_scoped_release without_gil;
                self.open(sealed.data(), sealed.size(), chain.data(), chain.size(), first, count, room.data(), reinterpret_cast<uint8_t*>(opened.data()));
            }
            return nb::bytes(opened.data(), opened.size());
        }, nb::arg("sealed"), nb::arg("chain"), nb::arg("records"), nb::arg("room").noconvert());
}

}  // namespace cloister
